"""What a model costs on a device: shapes, devices, FLOPs and bytes of a pass."""
