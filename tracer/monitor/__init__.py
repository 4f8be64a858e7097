"""Background outputs and inputs of a viewer: metrics, alerts, findings, the machine."""
