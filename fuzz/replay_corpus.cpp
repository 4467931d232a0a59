// A fuzz target without a fuzzer: every file of a corpus, then seeded mutations of them.
//
//   replay_corpus [--mutations N] [--seed S] FILE|FOLDER...
#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

namespace {

using Bytes = std::vector<uint8_t>;
constexpr unsigned kSecondsEach = 10;

std::string current_name;
Bytes current;

// What was being read, so that it can become a file of the corpus.
void report() {
  std::fprintf(stderr, "\nreplay_corpus: died of %s, %zu bytes:\n", current_name.c_str(), current.size());
  for (const uint8_t byte : current) std::fprintf(stderr, "%02x", byte);
  std::fprintf(stderr, "\n");
}

void on_signal(int signal) {
  if (signal == SIGALRM) std::fprintf(stderr, "replay_corpus: no end after %u s\n", kSecondsEach);
  report();
  _exit(1);
}

void run(const std::string& name, const Bytes& input) {
  current_name = name;
  current = input;
  alarm(kSecondsEach);
  // A block of its very size: reading behind the input is an error too.
  const Bytes exact(input);
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  alarm(0);
}

Bytes read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  Bytes mutate(const std::vector<Bytes>& corpus) {
    Bytes bytes = pick(corpus);
    for (uint64_t n = 1 + below(6); n-- > 0;) change(bytes, corpus);
    return bytes;
  }

 private:
  uint64_t below(uint64_t n) { return n == 0 ? 0 : random_() % n; }
  const Bytes& pick(const std::vector<Bytes>& corpus) { return corpus[below(corpus.size())]; }

  uint64_t number() {
    static constexpr uint64_t kEdges[] = {0,    1,    7,    8,     16,         24,        64,
                                          4095, 4096, 8192, ~0ull, 1ull << 32, 1ull << 63};
    const uint64_t edge = kEdges[below(std::size(kEdges))];
    switch (below(4)) {
      case 0:
        return random_();
      case 1:
        return random_() & 0xffff;
      default:
        return edge + 8 * below(5) - 16;
    }
  }

  void change(Bytes& bytes, const std::vector<Bytes>& corpus) {
    if (bytes.empty()) bytes.resize(1);
    const uint64_t size = bytes.size();
    switch (below(6)) {
      case 0:
        bytes[below(size)] ^= static_cast<uint8_t>(1u << below(8));
        return;
      case 1:
        bytes[below(size)] = static_cast<uint8_t>(random_());
        return;
      case 2:
      case 3: {  // a field: 2, 4 or 8 bytes, aligned as fields are
        const uint64_t width = 2ull << below(3), value = number();
        if (size < width) return;
        const uint64_t at = below(size / width) * width;
        std::memcpy(&bytes[at], &value, width);
        return;
      }
      case 4:
        bytes.resize(below(size) + 1);
        return;
      default: {  // a piece of another one
        const Bytes& other = pick(corpus);
        const uint64_t from = below(other.size()), to = below(size);
        const uint64_t n = std::min(below(256), std::min(other.size() - from, size - to));
        std::copy_n(other.begin() + static_cast<long>(from), n, bytes.begin() + static_cast<long>(to));
      }
    }
  }

  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  uint64_t mutations = 0, seed = 1;
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    if (word == "--mutations" && i + 1 < argc)
      mutations = std::strtoull(argv[++i], nullptr, 10);
    else if (word == "--seed" && i + 1 < argc)
      seed = std::strtoull(argv[++i], nullptr, 10);
    else if (std::filesystem::is_directory(word))
      for (const auto& entry : std::filesystem::directory_iterator(word)) files.push_back(entry.path());
    else
      files.emplace_back(word);
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) {
    std::fprintf(stderr, "replay_corpus: no inputs; name files or folders\n");
    return 2;
  }
  std::signal(SIGALRM, on_signal);
  std::signal(SIGABRT, on_signal);
  __sanitizer_set_death_callback(report);
  std::vector<Bytes> corpus;
  for (const auto& file : files) {
    corpus.push_back(read(file));
    run(file.string(), corpus.back());
  }
  Mutator mutator(seed);
  for (uint64_t i = 0; i < mutations; i++)
    run("mutation " + std::to_string(i) + " of seed " + std::to_string(seed), mutator.mutate(corpus));
  std::printf("%zu files, %llu mutations of seed %llu: nothing found\n", files.size(),
              static_cast<unsigned long long>(mutations), static_cast<unsigned long long>(seed));
  return 0;
}
