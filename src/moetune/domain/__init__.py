"""What moetune knows: no torch, no network, only text and packaged data."""
