"""Files of torch: torch.save, torch.distributed.checkpoint and Lightning, read without running code."""
