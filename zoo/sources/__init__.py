"""The models, by where they come from. Packages are imported inside the factories: a list needs none of them."""
