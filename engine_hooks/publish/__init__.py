"""From the buffer that hooks fill to the viewers that look, and to a recording without any."""
