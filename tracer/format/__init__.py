"""How numbers and texts are written for people."""
