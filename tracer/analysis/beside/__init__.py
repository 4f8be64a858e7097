"""Expected values beside measured ones."""
