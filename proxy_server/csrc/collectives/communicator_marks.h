// By what communicators are known outside of the server that has them: their ids, and how far they are.
#pragma once
#include <cstdint>

namespace understudy::server {

constexpr uint64_t kGivenUp = ~0ull;  // in a commit's mark: the communicator is gone since the commit before

// Messages from one rank to another, and those between two of them, count as a communicator of these two.
uint64_t uid_of_messages(uint64_t uid_low, uint64_t from, uint64_t to);
uint64_t uid_of_pair(uint64_t uid_low, uint64_t one, uint64_t other);

// Throws LogError.
void check_rank(uint64_t rank, uint64_t size);

}  // namespace understudy::server
