"""A real model under real traffic, with faults on demand."""
