"""What must hold before anything is started: machine, limits, data, checkpoint, a person's script."""
