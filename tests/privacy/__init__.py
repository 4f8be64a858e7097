"""What people wrote stays where it was shown, unless `--with-text` asks for it."""
