"""Data and networks for mnist.py.

data.py       the images: scikit-learn's digits, or MNIST
networks.py   the fused network and its plain twin, and the tutorial's loss
pictures.py   losses and predictions
"""
