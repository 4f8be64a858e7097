"""The terminal interface: screens over `tracer.state.view`. The only package that imports
textual."""
