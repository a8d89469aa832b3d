"""The state of running requests: their tokens, trees and slots, and what each pipeline has been told of them."""
