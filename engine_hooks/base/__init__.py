"""What every adapter is made of: the emitter, patches, the HTTP front end, marks and device
times."""
