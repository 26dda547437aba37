"""What a cache of some size would have kept of a recorded load, without a model or a device: the
prefix index and its policy are the real ones, memory only counts bytes."""
