"""An engine as a child process: started, watched, ended."""
