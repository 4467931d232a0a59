// A libnvidia-ml.so.1 whose GPUs are files in the folder of STAND_IN_NVML, each named by its UUID: lines of
// a word and a number (uncorrected, remap_pending, remap_failed, retirement_pending, action, mig, xid), or
// lost, reset, hangs, crashes alone. Without a file there is no such GPU; what no line names it does not
// tell. Who has asked for all of a GPU leaves a file UUID.asked.
//
// Functions are those of NVIDIA's nvml.h that nvidia-ml-py calls for us.
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kSuccess = 0, kNotSupported = 3, kNotFound = 6, kTimeout = 10, kLost = 15, kReset = 16;
constexpr uint64_t kXid = 8;
constexpr uint32_t kRecoveryAction = 230;
constexpr useconds_t kLookUs = 10'000;

struct Gpu {
  std::string uuid;
  size_t xids = 0;  // that have been told
};

// The event that a wait answers, and a value that is asked for by its number.
struct Event {
  Gpu* gpu;
  uint64_t type, data;
  uint32_t gpu_instance, compute_instance;
};
struct Field {
  uint32_t id, scope;
  int64_t timestamp, latency_us;
  uint32_t type;
  int result;
  uint64_t value;
};

using Lines = std::vector<std::pair<std::string, uint64_t>>;

std::string file_of(const Gpu& gpu) { return std::string(std::getenv("STAND_IN_NVML")) + "/" + gpu.uuid; }

std::optional<Lines> lines_of(const Gpu& gpu) {
  std::ifstream file(file_of(gpu));
  if (!file) return std::nullopt;
  Lines found;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    uint64_t number = 0;
    words >> word >> number;
    found.emplace_back(word, number);
  }
  return found;
}

std::optional<uint64_t> number_of(const Gpu& gpu, const char* word) {
  for (const auto& [name, number] : lines_of(gpu).value_or(Lines{}))
    if (name == word) return number;
  return std::nullopt;
}

std::vector<uint64_t> xids_of(const Gpu& gpu) {
  std::vector<uint64_t> found;
  for (const auto& [name, number] : lines_of(gpu).value_or(Lines{}))
    if (name == "xid") found.push_back(number);
  return found;
}

// What a call about it answers, or how it does not.
int state_of(const Gpu& gpu) {
  if (!lines_of(gpu)) return kNotFound;
  while (number_of(gpu, "hangs")) pause();
  if (number_of(gpu, "crashes")) std::raise(SIGSEGV);
  if (number_of(gpu, "lost")) return kLost;
  return number_of(gpu, "reset") ? kReset : kSuccess;
}

template <class T>
int tell(const Gpu* gpu, const char* word, T* to) {
  const std::optional<uint64_t> number = number_of(*gpu, word);
  if (!number) return kNotSupported;
  *to = static_cast<T>(*number);
  return kSuccess;
}

std::deque<Gpu>& gpus() {
  static std::deque<Gpu> known;
  return known;
}

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) { return kSuccess; }

const char* nvmlErrorString(int code) { return code == kLost ? "GPU is lost" : "an error"; }

int nvmlDeviceGetHandleByUUID(const char* uuid, Gpu** gpu) {
  for (Gpu& known : gpus())
    if (known.uuid == uuid) return *gpu = &known, state_of(known);
  *gpu = &gpus().emplace_back(Gpu{uuid});
  return state_of(**gpu);
}

int nvmlDeviceGetUUID(Gpu* gpu, char* uuid, unsigned size) {
  if (gpu->uuid.size() >= size) return kNotFound;
  std::memcpy(uuid, gpu->uuid.c_str(), gpu->uuid.size() + 1);
  return state_of(*gpu);
}

int nvmlDeviceGetMigMode(Gpu* gpu, unsigned* current, unsigned* pending) {
  *pending = 0;
  return tell(gpu, "mig", current);
}

int nvmlDeviceGetTotalEccErrors(Gpu* gpu, int kind, int counter, uint64_t* count) {
  const bool uncorrected_and_volatile = kind == 1 && counter == 0;
  return uncorrected_and_volatile ? tell(gpu, "uncorrected", count) : kNotSupported;
}

int nvmlDeviceGetRemappedRows(Gpu* gpu, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                              unsigned* failed) {
  *corrected = *uncorrected = 0;
  const int result = tell(gpu, "remap_pending", pending);
  return result == kSuccess ? tell(gpu, "remap_failed", failed) : result;
}

int nvmlDeviceGetRetiredPagesPendingStatus(Gpu* gpu, unsigned* pending) {
  return tell(gpu, "retirement_pending", pending);
}

int nvmlDeviceGetFieldValues(Gpu* gpu, int count, Field* fields) {
  for (int i = 0; i < count; i++) {
    unsigned action = 0;
    fields[i].result =
        fields[i].id == kRecoveryAction ? tell(gpu, "action", &action) : static_cast<int>(kNotSupported);
    std::memcpy(&fields[i].value, &action, sizeof action);
  }
  std::ofstream(file_of(*gpu) + ".asked");
  return kSuccess;
}

int nvmlEventSetCreate(std::vector<Gpu*>** set) {
  *set = new std::vector<Gpu*>;
  return kSuccess;
}

int nvmlDeviceRegisterEvents(Gpu* gpu, uint64_t types, std::vector<Gpu*>* set) {
  if (types != kXid) return kNotSupported;
  gpu->xids = xids_of(*gpu).size();  // what was before is not told
  set->push_back(gpu);
  return kSuccess;
}

int nvmlEventSetWait_v2(std::vector<Gpu*>* set, Event* event, unsigned timeout_ms) {
  for (useconds_t waited = 0; waited < timeout_ms * 1000; waited += kLookUs) {
    for (Gpu* const gpu : *set) {
      const std::vector<uint64_t> xids = xids_of(*gpu);
      if (xids.size() <= gpu->xids) continue;
      *event = {gpu, kXid, xids[gpu->xids++], UINT32_MAX, UINT32_MAX};
      return kSuccess;
    }
    usleep(kLookUs);
  }
  return kTimeout;
}
}
