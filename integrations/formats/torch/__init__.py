"""Read torch.save, torch.distributed.checkpoint and Lightning files without executing code from them."""
