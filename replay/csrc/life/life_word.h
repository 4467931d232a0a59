// What the word `server_life` of a control page says. As with robust mutexes (man 2 get_robust_list), it
// holds the id of the thread that holds it. FUTEX_WAITERS is always set, so that the kernel wakes whoever
// waits.
//
//   0                  nobody holds it: no device server is attached, or the kernel keeps no such lists
//   thread | WAITERS   a device server holds it
//   OWNER_DIED         the thread that held it has ended without letting go
//
// The worker maps the page, too, and may write anything here: the word alone is no evidence (process_end.h).
#pragma once
#include <linux/futex.h>

#include <cstdint>

namespace understudy::replay {

inline constexpr uint32_t kNobody = 0;
inline uint32_t held_by(uint32_t thread) { return (thread & FUTEX_TID_MASK) | FUTEX_WAITERS; }
inline bool owner_died(uint32_t word) { return (word & FUTEX_OWNER_DIED) != 0; }

}  // namespace understudy::replay
