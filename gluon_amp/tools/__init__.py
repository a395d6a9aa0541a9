"""What stands around training: the command, its doctor, the demo."""
