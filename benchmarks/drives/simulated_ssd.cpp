// A simulated SSD: a FUSE mount with two files, `dev`, the drive, whose content is kept in memory,
// and `ctl`, which takes commands.
//   g++ -O2 -std=c++20 simulated_ssd.cpp -o simulated_ssd -lfuse3
//   simulated_ssd MOUNT_POINT BYTES
// Prints "ready" once mounted and runs in the foreground. When its standard input ends, or by
// SIGTERM, it unmounts, removes the mount point and exits, so that it never outlives its parent.
//
// Model: requests are served one after another, each in max(1 / IOPS, bytes / BYTES_PER_SECOND),
// and answered LATENCY later. The kernel splits requests above 1 MiB. Commands, a line each; a
// write to `ctl` returns when they hold, with EINVAL for a line that is none:
//   rate IOPS BYTES_PER_SECOND LATENCY_US    the model; 0: no limit, which it starts with
//   fail r|w OFFSET LENGTH ERRNO [COUNT]     requests that touch the range fail, COUNT times (all)
//   short r|w OFFSET LENGTH KEEP [COUNT]     only KEEP bytes are moved
//   corrupt r OFFSET LENGTH [COUNT]          a bit in the middle of the answer is flipped
//   hang r|w OFFSET LENGTH [COUNT]           never answered
//   clear                                    no more of these four
#define FUSE_USE_VERSION 35
#include <fcntl.h>
#include <fuse3/fuse_lowlevel.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <queue>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr fuse_ino_t kRoot = FUSE_ROOT_ID;
constexpr fuse_ino_t kDevice = 2;
constexpr fuse_ino_t kControl = 3;
constexpr double kCacheSeconds = 3600;  // nothing here changes size or name
constexpr unsigned kMaxRequest = 1 << 20;
constexpr unsigned kMaxInFlight = 1024;
constexpr int kRequestsPerTurn = 64;  // taken before answers that are due are looked at again

int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

struct Fault {
  std::string kind;
  char direction = 0;  // 'r' or 'w'
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t argument = 0;  // errno, or bytes that are kept
  int64_t count = -1;     // how often it still strikes; negative: always
};

struct Answer {
  int64_t due_ns;
  uint64_t number;  // ties are answered in order of arrival
  fuse_req_t request;
  bool read;
  int error;
  uint64_t offset;
  uint64_t length;
  bool flip;

  bool operator<(const Answer& other) const {  // the earliest on top
    return due_ns != other.due_ns ? due_ns > other.due_ns : number > other.number;
  }
};

class Drive {
 public:
  Drive(char* memory, uint64_t size) : memory_(memory), size_(size) {}

  uint64_t size() const { return size_; }

  void read(fuse_req_t request, uint64_t offset, uint64_t length) {
    if (offset >= size_) {
      fuse_reply_buf(request, nullptr, 0);
      return;
    }
    length = std::min(length, size_ - offset);
    Answer answer{charge(length), 0, request, true, 0, offset, length, false};
    if (const Fault* fault = strike('r', offset, length)) {
      if (fault->kind == "hang") return;
      if (fault->kind == "fail") answer.error = static_cast<int>(fault->argument);
      if (fault->kind == "short") answer.length = std::min(length, fault->argument);
      answer.flip = fault->kind == "corrupt";
    }
    answer_later(answer);
  }

  void write(fuse_req_t request, const char* data, uint64_t length, uint64_t offset) {
    if (offset > size_ || length > size_ - offset) {
      fuse_reply_err(request, ENOSPC);
      return;
    }
    Answer answer{charge(length), 0, request, false, 0, offset, length, false};
    if (const Fault* fault = strike('w', offset, length)) {
      if (fault->kind == "hang") return;
      if (fault->kind == "fail") answer.error = static_cast<int>(fault->argument);
      if (fault->kind == "short") answer.length = std::min(length, fault->argument);
    }
    if (answer.error == 0) std::memcpy(memory_ + offset, data, answer.length);
    answer_later(answer);
  }

  // Answers what is due; nanoseconds until the next one, or -1.
  int64_t answer_due() {
    while (!pending_.empty()) {
      const int64_t left = pending_.top().due_ns - now_ns();
      if (left > 0) return left;
      const Answer answer = pending_.top();
      pending_.pop();
      send(answer);
    }
    return -1;
  }

  // False, with nothing changed, for a line that is no command.
  bool command(const std::string& line) {
    std::istringstream words(line);
    Fault fault;
    if (!(words >> fault.kind)) return true;
    if (fault.kind == "clear") {
      faults_.clear();
      return true;
    }
    if (fault.kind == "rate") {
      double iops = 0, bytes_per_second = 0, latency_us = 0;
      if (!(words >> iops >> bytes_per_second >> latency_us)) return false;
      iops_ = iops;
      bytes_per_second_ = bytes_per_second;
      latency_ns_ = static_cast<int64_t>(latency_us * 1000);
      return true;
    }
    const bool has_argument = fault.kind == "fail" || fault.kind == "short";
    if (!has_argument && fault.kind != "corrupt" && fault.kind != "hang") return false;
    if (!(words >> fault.direction >> fault.offset >> fault.length)) return false;
    if (has_argument && !(words >> fault.argument)) return false;
    if (!(words >> fault.count)) fault.count = -1;
    faults_.push_back(fault);
    return true;
  }

 private:
  int64_t charge(uint64_t bytes) {
    double seconds = 0;
    if (iops_ > 0) seconds = 1 / iops_;
    if (bytes_per_second_ > 0) {
      seconds = std::max(seconds, static_cast<double>(bytes) / bytes_per_second_);
    }
    free_at_ns_ = std::max(free_at_ns_, now_ns()) + static_cast<int64_t>(seconds * 1e9);
    return free_at_ns_ + latency_ns_;
  }

  const Fault* strike(char direction, uint64_t offset, uint64_t length) {
    for (Fault& fault : faults_) {
      const bool touches = offset < fault.offset + fault.length && fault.offset < offset + length;
      if (fault.direction != direction || fault.count == 0 || !touches) continue;
      if (fault.count > 0) --fault.count;
      return &fault;
    }
    return nullptr;
  }

  void answer_later(Answer answer) {
    answer.number = arrivals_++;
    if (answer.due_ns <= now_ns()) {
      send(answer);
    } else {
      pending_.push(answer);
    }
  }

  void send(const Answer& answer) const {
    if (answer.error != 0) {
      fuse_reply_err(answer.request, answer.error);
    } else if (!answer.read) {
      fuse_reply_write(answer.request, answer.length);
    } else if (answer.flip && answer.length > 0) {
      std::string changed(memory_ + answer.offset, answer.length);
      changed[answer.length / 2] ^= 1;
      fuse_reply_buf(answer.request, changed.data(), changed.size());
    } else {
      fuse_reply_buf(answer.request, memory_ + answer.offset, answer.length);
    }
  }

  char* const memory_;
  const uint64_t size_;
  double iops_ = 0;
  double bytes_per_second_ = 0;
  int64_t latency_ns_ = 0;
  int64_t free_at_ns_ = 0;
  uint64_t arrivals_ = 0;
  std::vector<Fault> faults_;
  std::priority_queue<Answer> pending_;
};

Drive& drive_of(fuse_req_t request) { return *static_cast<Drive*>(fuse_req_userdata(request)); }

struct stat attributes(fuse_req_t request, fuse_ino_t inode) {
  struct stat info{};
  info.st_ino = inode;
  info.st_nlink = inode == kRoot ? 2 : 1;
  info.st_mode = inode == kRoot ? S_IFDIR | 0755 : S_IFREG | 0644;
  if (inode == kDevice) {
    info.st_size = static_cast<off_t>(drive_of(request).size());
    info.st_blocks = info.st_size / 512;
    info.st_blksize = 4096;
  }
  return info;
}

void on_init(void*, fuse_conn_info* connection) {
  connection->max_write = kMaxRequest;
  connection->max_background = connection->congestion_threshold = kMaxInFlight;
  connection->want |= connection->capable & FUSE_CAP_ASYNC_DIO;
  connection->want &= ~FUSE_CAP_SPLICE_READ;
}

void on_lookup(fuse_req_t request, fuse_ino_t, const char* name) {
  fuse_entry_param entry{};
  if (std::strcmp(name, "dev") == 0) entry.ino = kDevice;
  if (std::strcmp(name, "ctl") == 0) entry.ino = kControl;
  if (entry.ino == 0) {
    fuse_reply_err(request, ENOENT);
    return;
  }
  entry.attr_timeout = entry.entry_timeout = kCacheSeconds;
  entry.attr = attributes(request, entry.ino);
  fuse_reply_entry(request, &entry);
}

void on_getattr(fuse_req_t request, fuse_ino_t inode, fuse_file_info*) {
  const struct stat info = attributes(request, inode);
  fuse_reply_attr(request, &info, kCacheSeconds);
}

// Opening `ctl` with O_TRUNC comes here; a drive keeps its size.
void on_setattr(fuse_req_t request, fuse_ino_t inode, struct stat*, int, fuse_file_info* file) {
  on_getattr(request, inode, file);
}

void on_open(fuse_req_t request, fuse_ino_t inode, fuse_file_info* file) {
  file->direct_io = inode == kControl;
  fuse_reply_open(request, file);
}

void on_read(fuse_req_t request, fuse_ino_t inode, size_t length, off_t offset, fuse_file_info*) {
  if (inode == kControl) {
    fuse_reply_buf(request, nullptr, 0);
  } else {
    drive_of(request).read(request, static_cast<uint64_t>(offset), length);
  }
}

void on_write(fuse_req_t request, fuse_ino_t inode, const char* data, size_t length, off_t offset,
              fuse_file_info*) {
  if (inode == kDevice) {
    drive_of(request).write(request, data, length, static_cast<uint64_t>(offset));
    return;
  }
  std::istringstream lines(std::string(data, length));
  for (std::string line; std::getline(lines, line);) {
    if (!drive_of(request).command(line)) {
      fuse_reply_err(request, EINVAL);
      return;
    }
  }
  fuse_reply_write(request, length);
}

void on_fsync(fuse_req_t request, fuse_ino_t, int, fuse_file_info*) { fuse_reply_err(request, 0); }

void serve(fuse_session* session, Drive& drive) {
  const int requests = fuse_session_fd(session);
  fcntl(requests, F_SETFL, fcntl(requests, F_GETFL) | O_NONBLOCK);
  fuse_buf buffer{};
  while (fuse_session_exited(session) == 0) {
    const int64_t left = drive.answer_due();
    const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
    pollfd files[] = {{requests, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    if (ppoll(files, 2, left < 0 ? nullptr : &timeout, nullptr) <= 0) continue;
    if (files[1].revents != 0) break;  // the parent ended
    for (int taken = 0; taken < kRequestsPerTurn; ++taken) {
      const int size = fuse_session_receive_buf(session, &buffer);
      if (size == -EINTR || size == -EAGAIN) break;
      if (size <= 0) {
        fuse_session_exit(session);
        break;
      }
      fuse_session_process_buf(session, &buffer);
    }
  }
  std::free(buffer.mem);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s MOUNT_POINT BYTES\n", argv[0]);
    return 2;
  }
  const uint64_t size = std::strtoull(argv[2], nullptr, 10);
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("memory of the drive");
    return 1;
  }
  prctl(PR_SET_TIMERSLACK, 1);  // or each answer would be up to 50 us late
  Drive drive(static_cast<char*>(memory), size);
  fuse_lowlevel_ops operations{};
  operations.init = on_init;
  operations.lookup = on_lookup;
  operations.getattr = on_getattr;
  operations.setattr = on_setattr;
  operations.open = on_open;
  operations.read = on_read;
  operations.write = on_write;
  operations.fsync = on_fsync;
  char name[] = "simulated_ssd";
  char options[] = "-oallow_other,default_permissions,fsname=simulated_ssd";
  char* arguments[] = {name, options};
  fuse_args parsed = FUSE_ARGS_INIT(2, arguments);
  fuse_session* session = fuse_session_new(&parsed, &operations, sizeof operations, &drive);
  if (session == nullptr || fuse_session_mount(session, argv[1]) != 0) return 1;
  fuse_set_signal_handlers(session);
  std::puts("ready");
  std::fflush(stdout);
  serve(session, drive);
  fuse_session_unmount(session);
  fuse_session_destroy(session);
  rmdir(argv[1]);
  return 0;
}
