"""What every long run needs, whatever it computes: folder, lock, records, checkpoints."""
