"""The real engine on modelled devices under a virtual clock: same loop, scheduler, strategies, trees and stages."""
