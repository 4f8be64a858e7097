"""What is built to be installed elsewhere."""
