//! The wire types, generated from `proto/hedgerow/v1`.
//!
//! The proto files are the contract with harnesses and trainers; this module adds nothing to them. Only `rpc` and the
//! clients in `cli` and in tests may use these types: everything within speaks the types of its own module.

/// Messages, clients and servers of the package `hedgerow.v1`.
#[expect(
    clippy::allow_attributes,
    clippy::large_enum_variant,
    reason = "generated from the proto files, which hold the comments"
)]
pub mod v1 {
    tonic::include_proto!("hedgerow.v1");
}

/// The encoded `google.protobuf.FileDescriptorSet` of the package and its imports, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hedgerow_descriptor.bin"));
