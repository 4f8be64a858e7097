"""The pure fold from events to what is shown: no clock, no I/O, no Textual."""
