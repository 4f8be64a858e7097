"""What screens are made of: canvases, panels, bars, plots, colours, the terminal."""
