"""An engine, a server, a prover and a demo, to try kvarve and to prove it: not the product."""
