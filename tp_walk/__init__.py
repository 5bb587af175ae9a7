"""Block drafting's serial Markov walk as one launch a block, over the ranks of a tensor-parallel group."""
