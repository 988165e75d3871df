"""PyTorch on scikit-learn's digits, in the style of Flower's quickstarts."""
