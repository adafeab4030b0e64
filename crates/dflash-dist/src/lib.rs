//! Rendezvous, launcher and collectives.
