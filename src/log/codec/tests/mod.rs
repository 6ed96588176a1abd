//! The codec, tested.
