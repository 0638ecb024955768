"""Read and write Orbax checkpoints."""
