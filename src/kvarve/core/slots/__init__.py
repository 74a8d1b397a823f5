"""Slots of the device and of the host.

slot_pools  how many each pool has, and which are free
extents     how pools share a tier's bytes
residency   which page is in which slot, and what pins it; frees a slot when its page leaves
candidates  the pages that may be evicted, in an eviction order (`orders`); names the next victim
eviction    makes room for those who need slots: takes the victims, and asks for copies of what would be lost
shares      what one salt may have
"""
