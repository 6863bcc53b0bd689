"""What every long run needs: engine, folder, lock, records, checkpoints, processes."""
