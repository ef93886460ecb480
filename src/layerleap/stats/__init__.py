"""Stats: what a linear map needs to know, in constant memory, additive and mergeable."""
