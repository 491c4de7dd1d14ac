"""Model families, written over the kernel seam."""
