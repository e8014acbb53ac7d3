"""How to speak to each kind of engine, and `sim`, an engine that computes nothing."""
