"""Keyframes: the state written down (`keyframer`) and made again (`restore`), so that not
everything need be folded."""
