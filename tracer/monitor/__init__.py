"""What works beside a viewer: metrics, alerts, findings, and what the machine says of itself."""
