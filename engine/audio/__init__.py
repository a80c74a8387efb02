"""Audio on its way in: bytes to samples, and where speech begins and ends."""
