//! Turns the proto files into Rust, and keeps their descriptors for reflection. Needs no `protoc`.

use std::{env, error::Error, fs, path::Path};

use protox::prost::Message as _;

/// Everything that a client may import, relative to `proto/`.
const PROTO_FILES: [&str; 5] = [
    "hedgerow/v1/common.proto",
    "hedgerow/v1/harness.proto",
    "hedgerow/v1/trainer.proto",
    "hedgerow/v1/inspect.proto",
    "hedgerow/v1/admin.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto/build.rs");
    for file in PROTO_FILES {
        println!("cargo::rerun-if-changed=proto/{file}");
    }
    let descriptors = protox::compile(PROTO_FILES, ["proto"])?;
    let out_dir = env::var("OUT_DIR")?;
    fs::write(Path::new(&out_dir).join("hedgerow_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").btree_map(".").compile_fds(descriptors)?;
    Ok(())
}
