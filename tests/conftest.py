"""Settings of the whole suite."""

import torch

# The tensors of the tests are small: one thread is the fastest, and the order of every sum is then fixed.
torch.set_num_threads(1)
