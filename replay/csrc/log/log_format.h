// The log: the one definition of its layout, used by the writer (worker), the reader (device server)
// and the tools (proxyd, recoveryctl).  docs/log-format.md explains it to a person.
//
// A rank's log is a directory of six files in shared memory, created and removed by proxyd:
//
//   control     ControlPage (control_page.h), then the reply area
//   marks       how far communicators have come, as far as the control page has no place for it; sparse
//   dictionary  templates of operator calls, in regions that are used again and again; sparse
//   segments    `segment_count` segments of `segment_bytes`; sparse, so untouched ones cost nothing
//   shadow      state saved at commits (manifests and rank-private buffers); sparse
//   snapshot    the whole state at a commit now and then; sparse
//
// A log offset counts bytes since the session began and never wraps.  Offset -> byte in `segments`:
//   logical = offset / segment_bytes;  physical = segment_of[logical % segment_count]
// A record never straddles two segments; a PAD record fills the rest of one.
//
// A template's id counts bytes of templates since the session began; it is a multiple of kAlign and never
// comes again.  Id -> byte in `dictionary`: id % dictionary_bytes.  A template never straddles two regions of
// dictionary_bytes / kTemplateRegions bytes.  Those in [dictionary_begin, dictionary_tail) can be read.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace understudy::replay {

inline constexpr uint64_t kMagic = 0x3159445453444e55ull;  // "UNDSTDY1"
inline constexpr uint32_t kVersion = 18;
inline constexpr uint64_t kMaxSegments = 4096;
inline constexpr uint64_t kTemplateRegions = 16;
inline constexpr uint64_t kCommitRing = 64;
// What tells of communicators names so many in its place, and the others in the file `marks`.
inline constexpr uint64_t kMarksInPlace = 32;
inline constexpr uint64_t kMaxCommunicators = 4096;
inline constexpr uint64_t kMaxDrills = 256;
inline constexpr uint64_t kRecentSteps = 8;
inline constexpr uint64_t kSnapshotLeases = 6;
// Published: the one that counts stays until the new one does, and so do those that somebody reads.
inline constexpr uint64_t kSnapshots = 2 + kSnapshotLeases;
inline constexpr uint64_t kAlign = 8;

enum class Kind : uint16_t {
  kPad = 0,                   // rest of a segment
  kOperator = 1,              // aux = template id; values, then one handle per fresh output
  kOperatorSync = 2,          // aux = template id; sync; values, then the first handle for outputs
  kFree = 3,                  // only carries piggybacked frees
  kAllocate = 4,              // aux = handle; [bytes]
  kResize = 5,                // aux = handle; [bytes]
  kHostToDevice = 6,          // aux = handle; [byte offset, bytes], payload
  kDeviceToHost = 7,          // aux = handle; sync; [byte offset, bytes]
  kSeed = 8,                  // aux = generator; [seed]
  kGeneratorGet = 9,          // aux = generator; sync
  kGeneratorSet = 10,         // aux = generator; [16], seed, offset: as CUDA shows a state
  kGeneratorFree = 11,        // aux = generator
  kPhase = 12,                // aux = Phase
  kCommit = 13,               // aux = CommitKind
  kSetting = 14,              // aux = Setting; [value]
  kCommunicatorCreate = 15,   // aux = communicator; [uid low, uid high, rank, size, timeout ms]
  kCommunicatorDestroy = 16,  // aux = communicator
  kCollective = 17,           // aux = communicator; CollectiveHeader, then raw tensors
  kSynchronize = 18,          // aux = WaitFor; sync; [communicator or mark]; waits for what came before it
  kEnd = 19,                  // sync; orderly end of the session
  kMemory = 20,               // aux = MemoryQuery; sync; the reply is a MemoryStatistics, not compared
  kEnvironment = 21,          // [bytes], text; what kernel_environment.h says of it
  kStream = 22,               // aux = stream; what follows is enqueued there
  kStreamMark = 23,  // aux = mark; [stream, communicator]; how far the stream has come, or the end of
                     // what the communicator was given last, if it is not 0
  kStreamWait = 24,  // aux = mark; [stream]; what follows there waits for that
  kStreamUse = 25,   // aux = handle; [stream]; its memory may be freed only when the stream is through
};
inline constexpr uint16_t kKinds = 26;

enum class Phase : uint32_t { kForwardBackward = 0, kOptimizer = 1 };
// Everything: also collectives in flight; the stream: not for those (whoever needs their results does); a
// barrier: the communicator's newest; a mark: that of an event.
enum class WaitFor : uint64_t { kEverything = 0, kStream = 1, kBarrier = 2, kMark = 3 };
enum class CommitKind : uint64_t { kStep = 0, kAutomatic = 1 };
// What each is, and how it is read and set: torch_settings.h.
enum class Setting : uint64_t {
  kThreads = 0,
  kDeterministic = 1,
  kMatmulPrecision = 2,
  kFlushDenormal = 3,
  kDefaultDtype = 4,
  kFillUninitialized = 5,
  kTf32Cudnn = 6,
  kTf32OneDnn = 7,
  kFloat32 = 8,
  kFloat32OneDnn = 9,
  kFloat32OneDnnConvolution = 10,
  kFloat32OneDnnRecurrent = 11,
  kFloat32OneDnnProduct = 12,
  kFloat32Cuda = 13,
  kFloat32CudaConvolution = 14,
  kFloat32CudaRecurrent = 15,
  kFloat32CudaProduct = 16,
  kFloat16ReductionCublas = 17,
  kBFloat16ReductionCublas = 18,
  kFloat16AccumulationCublas = 19,
  kFloat16ReductionCpu = 20,
  kOneDnn = 21,
  kOneDnnDeterministic = 22,
  kNnpack = 23,
  kCudnn = 24,
  kCudnnBenchmark = 25,
  kCudnnBenchmarkLimit = 26,
  kCudnnDeterministic = 27,
  kCudnnDepthwise = 28,
  kMiopenImmediate = 29,
  kFlashAttention = 30,
  kFlashAttention3 = 31,
  kMemoryEfficientAttention = 32,
  kMathAttention = 33,
  kCudnnAttention = 34,
  kOverrideableAttention = 35,
  kMathAttentionReduction = 36,
  kAttentionOrder = 37,
  kLinalgBackend = 38,
  kBlasBackend = 39,
  kRocmAttention = 40,
  kSmCarveout = 41,
  kQuantizedEngine = 42,
  kSparseInvariants = 43,
};
inline constexpr uint64_t kSettings = 44;

// 24 bytes.  A record's body starts with `frees` handles that are freed before it runs.  A sync record's body
// goes on with [sequence, digest of the delivered reply (written by the server, 0 = none yet)].
struct Record {
  uint32_t bytes;  // of the whole record, a multiple of kAlign
  uint16_t kind;
  uint16_t frees;
  uint64_t index;  // counts records since the session began
  uint64_t aux;
  uint64_t* body() { return reinterpret_cast<uint64_t*>(this + 1); }
  const uint64_t* body() const { return reinterpret_cast<const uint64_t*>(this + 1); }
};
static_assert(sizeof(Record) == 24);

inline bool is_operator(Kind k) { return k == Kind::kOperator || k == Kind::kOperatorSync; }

inline bool is_sync(Kind k) {
  return k == Kind::kOperatorSync || k == Kind::kDeviceToHost || k == Kind::kGeneratorGet ||
         k == Kind::kSynchronize || k == Kind::kEnd || k == Kind::kMemory;
}

// ---- the script's streams. 0 is the default one; others are 2 * a number from 1, + 1 for a high priority. A
// log has records of them from the first that is made: until then everything is on the default stream.
inline constexpr uint64_t kStreams = 17;  // of the device: the default one, and 16 that the others share
inline uint64_t place_of_stream(uint64_t stream) {
  return stream < 2 ? 0 : 1 + (stream / 2 - 1) % (kStreams - 1);
}
// Whether it matters to a record on which stream it lies.
inline bool is_enqueued(Kind k) {
  return is_operator(k) || k == Kind::kAllocate || k == Kind::kResize || k == Kind::kHostToDevice ||
         k == Kind::kDeviceToHost || k == Kind::kCollective;
}
// Whether it only keeps account: of memory, or of streams.
inline bool is_account(Kind k) { return k == Kind::kFree || (k >= Kind::kStream && k <= Kind::kStreamUse); }

// ---- memory of the device. What it is used for depends on the server's own past (a recovery, another
// driver), so a replay does not compare these replies.
enum class MemoryQuery : uint64_t { kRead = 0, kResetPeak = 1, kResetAccumulated = 2, kEmptyCache = 3 };
inline constexpr uint64_t kMemoryQueries = 4;
struct MemoryCounter {
  uint64_t current, peak, allocated, freed;  // the last two only grow
};
struct MemoryStatistics {
  MemoryCounter bytes, blocks;       // of the program's buffers
  MemoryCounter reserved;            // bytes: the above, and what the server keeps beside them
  uint64_t free_bytes, total_bytes;  // of the device
};

// ---- templates (dictionary): everything of a call that does not change from step to step
// ---------------------- Header, operator name (padded to 8 bytes), key words (arguments), output words.
struct TemplateHeader {
  uint32_t bytes, name_bytes, key_words, output_words;
};

// First byte of a key word.  Values (handles, doubles, generators, CPU tensor bytes) travel in the record.
enum class Tag : uint8_t {
  kNone = 0,
  kTensor = 1,  // |dtype<<8|dim<<16|flags<<24, offset, sizes, strides        value: handle
  kUndefined = 2,
  kCpuTensor = 3,   // |dtype<<8|dim<<16|flags<<24, sizes                         value: bytes, padded
  kTensorList = 4,  // |count<<8, then items
  kOptionalTensorList = 5,
  kInt = 6,              // word
  kDouble = 7,           //                                                            value: double
  kBool = 8,             // |value<<8
  kString = 9,           // |bytes<<8, padded
  kDevice = 10,          // the server's own device
  kGenerator = 11,       //                                                            value: generator
  kIntList = 12,         // |count<<8, words
  kDoubleList = 13,      // |count<<8                                                  value: doubles
  kBoolList = 14,        // |count<<8, words
  kList = 15,            // |count<<8, then items (scalars)
  kComplex = 16,         //                                                            value: 2 doubles
  kConstantDouble = 17,  // word: a double that belongs to the key (factories)
  kCpuDevice = 18,
  // Sparse tensors, made of dense ones ("raw": tensor word, handle, offset, sizes, strides).
  kSparse =
      19,  // |dtype<<8|dim<<16|sparse dim<<24, sizes           value: coalesced, raw indices, raw values
  kSparseCompressed = 20,  // |dtype<<8|dim<<16|c10::Layout<<24, sizes
                           //                  value: raw compressed indices, raw plain indices, raw values
  // Tensors of other sizes each, in one buffer.
  kNested = 21,  // |dtype<<8|dim of each<<16
                 //                  value: components, raw buffer, then of each: sizes; strides; offset
};
// Tensor flags (bits 24..31 of a tensor word). kOtherFlags: of a written argument, which the operator leaves
// with other bits than it came with.
inline constexpr uint64_t kWrappedNumber = 1, kConjugate = 2, kNegative = 4, kFresh = 8, kOtherFlags = 16;

// Output words: per return  [kind | items<<8]  (kind 0 = written argument, with flags instead of a count, 1 =
// tensor, 2 = list, 3 = number, which follows instead of items), per item [mode | dtype<<8 | dim<<16 |
// flags<<24]; mode 0 (fresh) is followed by offset, storage bytes, sizes, strides; mode 1 = none.

// ---- collectives
enum class CollectiveKind : uint64_t {
  kBroadcast = 0,
  kAllReduce,
  kReduce,
  kAllGather,
  kAllGatherBase,
  kGather,
  kScatter,
  kReduceScatter,
  kReduceScatterBase,
  kAllToAllBase,
  kAllToAll,
  kBarrier,
  kSend,
  kReceive,
  kReceiveAny,
  kGroupBegin,  // no collectives: what lies between these two may start only together. No tensors, no
  kGroupEnd,    // sequence; records of other kinds never lie between
};
inline constexpr uint64_t kCollectiveKinds = 17;
struct CollectiveHeader {
  // peer: root, source or destination rank; reduce_op: c10d::ReduceOp::RedOpType. Receive-any has a second
  // output, one int64, that gets the sender's rank.
  uint64_t kind, reduce_op, peer, tag;
  uint64_t sequence;  // per communicator, counts from 1
  uint64_t inputs, outputs,
      splits;  // tensors (raw: tensor word, handle, offset, sizes, strides), split words
};

// ---- what the control page consists of; control_page.h says where it lies, and who writes it
enum class SessionState : uint32_t { kOpen = 0, kLost = 1, kClosed = 2 };
enum class ErrorKind : uint32_t {
  kNone = 0,
  kRuntime = 1,
  kIndex = 2,
  kValue = 3,
  kType = 4,
  kNotImplemented = 5,
  kOutOfMemory = 6,
  kDistributed = 7,
  kLost = 8,
  kLinAlg = 9,
  kBuffer = 10,
};
// Numbers of recovery/drills/fault_table.py. The server does them itself, but for those that only proxyd can
// do: there it waits until proxyd has.
enum class DrillKind : uint32_t {
  kNone = 0,
  kKillServer = 1,
  kStopServer = 2,
  kCallError = 3,
  kStickyError = 4,
  kDriverSuspect = 5,
  kCollectiveHang = 6,
  kNetworkPartition = 7,
  kLastingPartition = 8,
  kDeviceGone = 9,
  kBitFlip = 10,
  kSlowRank = 11,
  kKillSpare = 12,
  kKillAllServers = 13,
  kKillProxyd = 14,
  kKillWorker = 15,
};
enum class DrillState : uint32_t { kArmed = 0, kFired = 1, kDone = 2 };  // done: proxyd has done its part

struct Drill {
  uint32_t kind;
  std::atomic<uint32_t> state;
  uint64_t step, call;   // minibatch and record in it, both from 1; 0 and 0: the next record
  uint64_t fired_at_ns;  // CLOCK_MONOTONIC, written just before the fault
  uint64_t detail;       // bit-flip: the handle of the buffer
};

// How far a communicator has come on this rank: collectives (or, between two ranks, messages) begun.
struct StartedMark {
  std::atomic<uint64_t> uid_low, uid_high, sequence, size;
};

struct CommunicatorMark {
  uint64_t uid_low, uid_high, sequence, members;
};

inline constexpr uint32_t kCommitComplete = 1;  // its manifest and shadows can rebuild what no replica holds
inline constexpr uint32_t kCommitFreesApplied = 2;  // the frees of the record at log_offset are already done
inline constexpr uint32_t kCommitOptimizer =
    4;  // an optimizer step without pre-images begins right behind it
struct CommitEntry {
  uint64_t number;                    // from 1; commit 0 is the empty state before the first record
  uint64_t log_offset, record_index;  // where execution goes on after this commit
  uint64_t step;                      // optimizer steps so far
  uint64_t call;  // records of the current minibatch before the commit (0 unless automatic)
  uint64_t manifest_offset, manifest_bytes;  // in `shadow`; 0 bytes = none (no protection)
  uint32_t flags, communicators;
  CommunicatorMark communicator[kMarksInPlace];
  // Of the optimizer step before it (step_digest.h of the server); 0 = nobody knows. Not in stored rows.
  uint64_t step_digest;
};
// Stored behind it: its marks that have no place in it.
inline constexpr uint64_t kStoredCommitBytes = offsetof(CommitEntry, step_digest);

// ---- `marks`: a row for each row of commits and of snapshots in the control page, and one for what has been
// started
inline constexpr uint64_t kMoreMarks = kMaxCommunicators - kMarksInPlace;
inline constexpr uint64_t kStartedRow = kCommitRing + kSnapshots;
inline constexpr uint64_t kMarkRows = kStartedRow + 1;
inline uint64_t mark_row_of_commit(uint64_t number) { return number % kCommitRing; }
inline uint64_t mark_row_of_snapshot(uint64_t slot) { return kCommitRing + slot; }

// The whole state at a commit, in `snapshot`: with the log since then this rank can be rebuilt by itself. The
// manifest that `commit` names lies in `snapshot` too.
struct SnapshotEntry {
  std::atomic<uint64_t> serial;  // of the order it fulfils; 0 = none, or it is just being written
  uint64_t bytes;                // copied for it; what had not changed since the one before was not
  uint64_t nanoseconds;          // that the device server spent on it
  CommitEntry commit;
};

// An order for a snapshot, in one word: serial and step. A server takes it at its first commit with that many
// optimizer steps, or at its next commit if the step is kAtNextCommit.
inline constexpr int kOrderStepBits = 36;
inline constexpr uint64_t kAtNextCommit = (1ull << kOrderStepBits) - 1;
inline uint64_t order_of(uint64_t serial, uint64_t step) { return serial << kOrderStepBits | step; }
inline uint64_t serial_of(uint64_t order) { return order >> kOrderStepBits; }
inline uint64_t step_of(uint64_t order) { return order & kAtNextCommit; }
// So many may be ahead at a time; the one with serial n lies in snapshot_orders[n % kSnapshotOrders].
inline constexpr uint64_t kSnapshotOrders = 4;

// Reply area: ReplyHeader, then the payload.
struct ReplyHeader {
  uint64_t bytes;
  uint32_t error_kind, reserved;
};

// ---- manifest of a commit (in `shadow`, or in `snapshot`)
inline constexpr uint64_t kManifestMagic = 0x32534546494e414dull;     // "MANIFES2"
inline constexpr uint64_t kOldManifestMagic = 0x31534546494e414dull;  // its digests are others
inline constexpr uint64_t kNotShadowed = ~0ull;
struct ManifestHeader {
  uint64_t magic, commit, buffers, generators, communicators, settings;
  uint64_t bytes;   // of the whole manifest
  uint64_t digest;  // XXH3-64 of everything behind this header
};
struct ManifestBuffer {
  uint64_t handle, bytes;
  uint64_t digest;         // ContentDigest; valid if has_digest
  uint64_t shadow_offset;  // where its content lies in `shadow`, or kNotShadowed
  uint64_t has_digest;     // 0 no, 1 yes, 2 = the content was not kept because no replay reads it
};
struct ManifestGenerator {
  uint64_t generator, bytes, shadow_offset;
};
struct ManifestCommunicator {
  uint64_t communicator, uid_low, uid_high, rank, size, sequence, timeout_ms;
};
struct ManifestSetting {
  uint64_t setting, value;  // or kEnvironmentText, and the next eight bytes of the session's
};
inline constexpr uint64_t kEnvironmentText = 1 << 16;
inline constexpr uint64_t kCurrentStream = kEnvironmentText + 1;  // the value: on which records lie

}  // namespace understudy::replay
