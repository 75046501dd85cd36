"""`python -m examples.demo`: fused layers learn handwritten digits beside plain ones.

data.py         the digits: scikit-learn's, or MNIST's files
training.py     the two networks, taking turns
pictures.py     losses and predictions
__main__.py     the command line
"""
