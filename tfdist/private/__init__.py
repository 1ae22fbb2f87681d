"""Private modules and members of Keras and TensorFlow that tfdist uses: only this folder imports them."""
