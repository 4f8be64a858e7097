"""The faults of the fault lab that live inside an engine. Loaded only where ``TRACER_FAULT`` is
set."""
