#include "tests/csrc/simulated_cuda/shared_room.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <stdexcept>

#include "tests/csrc/simulated_cuda/settings.h"

namespace understudy::simulated {

struct SharedRoom::Account {
  pid_t process;  // 0: nobody's
  uint64_t bytes;
};

namespace {

constexpr int kProcesses = 256;

// Between processes; threads of one have a mutex of their own.
class Locked {
 public:
  explicit Locked(int file) : file_(file) { flock(file_, LOCK_EX); }
  ~Locked() { flock(file_, LOCK_UN); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  int file_;
};

// One that nobody has waited for yet has given back what it had.
bool lives(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return false;
  const size_t behind_name = text.rfind(')');
  return behind_name != std::string::npos && text.substr(behind_name + 2, 1) != "Z";
}

}  // namespace

SharedRoom::SharedRoom(const std::string& folder, uint64_t bytes) : bytes_(bytes) {
  if (folder.empty()) return;
  const std::string path = folder + "/" + visible_gpu();
  constexpr size_t kSize = kProcesses * sizeof(Account);
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file_ < 0 || ftruncate(file_, kSize) != 0)
    throw std::runtime_error("the simulated CUDA device cannot be shared");
  void* const at = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (at == MAP_FAILED) throw std::runtime_error("the simulated CUDA device cannot be shared");
  accounts_ = static_cast<Account*>(at);
}

SharedRoom::~SharedRoom() {
  if (accounts_ != nullptr) munmap(accounts_, kProcesses * sizeof(Account));
  if (file_ >= 0) close(file_);
}

SharedRoom::Account* SharedRoom::own() {
  Account* free = nullptr;
  for (Account* one = accounts_; one != accounts_ + kProcesses; one++) {
    if (one->process == getpid()) return one;
    if (one->process != 0 && !lives(one->process)) *one = {0, 0};
    if (one->process == 0 && free == nullptr) free = one;
  }
  if (free == nullptr) throw std::runtime_error("too many processes share the simulated CUDA device");
  free->process = getpid();
  return free;
}

bool SharedRoom::take(uint64_t bytes) {
  if (accounts_ == nullptr) return true;
  const Locked lock(file_);
  Account* const mine = own();
  uint64_t taken = 0;
  for (const Account* one = accounts_; one != accounts_ + kProcesses; one++)
    if (one->process != 0 && lives(one->process)) taken += one->bytes;
  if (taken + bytes > bytes_) return false;
  mine->bytes += bytes;
  return true;
}

void SharedRoom::give_back(uint64_t bytes) {
  if (accounts_ == nullptr) return;
  const Locked lock(file_);
  own()->bytes -= bytes;
}

}  // namespace understudy::simulated
