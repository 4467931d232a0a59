// Stores by their path: a file, or a raw partition.
#pragma once
#include <memory>
#include <string>

#include "recovery/snapshots/csrc/store/store.h"

namespace understudy::persistence {

// Makes a file with an empty store, or an empty store on a partition whose first two blocks are zero.  Throws
// StoreError and StorageError (EEXIST: there is a file); then it leaves no file behind.
void create_store(const std::string& path, const Geometry& geometry);

// Throws StoreError (not a store, another version, cut off, another process writes it) and StorageError.
// `notes`: what the engine and the store have to say, a sentence each.
std::shared_ptr<Store> open_store(const std::string& path, Engine engine, StoreOptions options,
                                  std::string* notes);

}  // namespace understudy::persistence
