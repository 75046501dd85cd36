"""What mnist.py needs beside its own lines.

data.py       the images: scikit-learn's digits, or MNIST
networks.py   the fused network and its plain twin, and the tutorial's loss
pictures.py   losses and predictions
"""
