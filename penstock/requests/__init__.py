"""What is known of the requests that run: their tokens, trees and slots, and what each pipeline has been told."""
