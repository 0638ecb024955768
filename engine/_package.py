"""holdfast keeps the state of training runs safe."""
