"""`make zoo`: real PyTorch architectures, each exported, checked, served and compared; the result is a document."""
